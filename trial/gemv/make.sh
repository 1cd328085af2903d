# make.sh OUT STAGES KERNELS: compiles few_rows.cu for sm_90
cd /work/wt/gemv
printf "#define STAGES %s\n#define KERNELS %s\n" "$2" "$3" > build/gemv/$1.h
nice -n 5 nvcc -std=c++17 -O3 -arch=sm_90 -shared -Xcompiler -fPIC,-fvisibility=hidden --no-compress --diag-suppress=940,2473 -I ffi -isystem /work/venv/lib/python3.12/site-packages/jaxlib/include -include build/gemv/$1.h -Xptxas -v ffi/quantized/few_rows.cu -o build/gemv/$1 > build/gemv/$1.log 2>&1
grep "error\|warning\|Used\|spill\|Compiling" build/gemv/$1.log | grep -v "0 bytes spill stores, 0 bytes spill" | sed 's/.*kernelI/K /; s/FewRowsArgs.*//; s/.*Used/  Used/' | paste - - | head -${4:-40}
