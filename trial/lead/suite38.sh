# suite.sh FOLDER OUT SECONDS [pytest arguments]: the GPU suite, each result on a line in OUT/suite.txt
here=$1; out=$2; seconds=$3; shift 3
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false'
export PYTHONUNBUFFERED=1
timeout -s INT -k 15 $seconds python3 -m pytest -m gpu -n 18 --dist worksteal -v -rf --tb=short -p no:cacheprovider "$@" > $out/suite.txt 2>&1
echo rc $?
grep -c " PASSED " $out/suite.txt; grep -c " SKIPPED " $out/suite.txt; grep " FAILED \| ERROR " $out/suite.txt | head -40
tail -3 $out/suite.txt
