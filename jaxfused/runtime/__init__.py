"""What every operator needs: the Runner, shards, checks of arguments, tuning table, CUDA library."""
