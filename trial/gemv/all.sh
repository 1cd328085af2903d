cd /work/wt/gemv; source /work/env.sh; export PYTHONPATH=$PWD
bash /work/gpu/gemv/make.sh main.so "CASE(4)" "BUILT(kInt4, 2) BUILT(kInt4, 4) BUILT(kInt4, 8) BUILT(kZeroPoints, 2) BUILT(kZeroPoints, 8) BUILT(kBits, 8) BUILT(kMixed, 8) BUILT(kTable, 4)" 3
bash /work/gpu/gemv/make.sh more.so "CASE(3) CASE(6)" "BUILT(kInt4, 2) BUILT(kBits, 8) BUILT(kTable, 4)" 3
for f in main more; do xz -9 -k -c build/gemv/$f.so > /work/gpu/gemv/$f.so.xz; done; date
bash /work/gpu/gemv/emu.sh "CASE(4)" "BUILT(kInt4, 2) BUILT(kInt4, 4) BUILT(kInt4, 8) BUILT(kZeroPoints, 2) BUILT(kZeroPoints, 8) BUILT(kBits, 8) BUILT(kMixed, 8) BUILT(kTable, 4)"; date
