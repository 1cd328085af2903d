# run.sh FOLDER OUT: what the first call's suite did not reach
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false' PYTHONPATH=$PWD:$1
python3 -m pytest -p rest_plugin -m gpu -n ${N_WORKERS:-10} --dist worksteal -v -rf --tb=short -p no:cacheprovider > $2/suite.txt 2>&1
grep -c ' PASSED ' $2/suite.txt; grep -c ' SKIPPED ' $2/suite.txt; grep ' FAILED \| ERROR ' $2/suite.txt | cut -c1-200 | head -40; tail -3 $2/suite.txt
