"""Code that every operator uses: Runner, sharding, checks of arguments, tuning table, CUDA library."""
