# builds build/gemv/${3:-emu}.so from few_rows.cu for this CPU
cd /work/wt/gemv; source /work/env.sh
nice -n 5 python - <<'P'
from tests.cuda_emulator import build as b
from pathlib import Path
out=Path('build/gemv/src')
for p in [*sorted(b.FFI.glob("common/*")), b.FFI/'quantized/few_rows.cu', b.FFI/'quantized/quantized_epilogue.cuh']:
    t=out/p.relative_to(b.FFI); t.parent.mkdir(parents=True,exist_ok=True)
    b._write(t.with_suffix('.cc') if p.suffix=='.cu' else t, b.as_cpp(p.read_text()))
import jax
open('build/gemv/inc','w').write(f"-I{out} -I{b.HERE} -I{jax.ffi.include_dir()} -I{b._cuda_headers()}")
P
printf "#define STAGES %s\n#define KERNELS %s\n" "$1" "$2" > build/gemv/emu.h; D=(-include build/gemv/emu.h)
F="-std=c++20 -fPIC -fno-strict-aliasing -w -ffp-contract=off -fvisibility=hidden $(cat build/gemv/inc) -DEMULATED_CUDA_ARCH=900 -DJAXFUSED_ARCHITECTURES=\"90\" -include emulator_ffi.h "
[ build/gemv/e1.o -nt tests/cuda_emulator/emulator.cc ] || nice -n 5 g++ $F "${D[@]}" -O3 -c tests/cuda_emulator/emulator.cc -o build/gemv/e1.o
[ build/gemv/e2.o -nt tests/cuda_emulator/ptx.cc ] || nice -n 5 g++ $F "${D[@]}" -O3 -c tests/cuda_emulator/ptx.cc -o build/gemv/e2.o
(nice -n 5 g++ $F "${D[@]}" -O1 -c build/gemv/src/quantized/few_rows.cc -o build/gemv/k.o && nice -n 5 g++ $F "${D[@]}" -O1 -c build/gemv/src/common/library.cc -o build/gemv/l.o && g++ -shared build/gemv/k.o build/gemv/l.o build/gemv/e1.o build/gemv/e2.o -o build/gemv/${3:-emu}.so -ldl) 2>&1 | grep -m 8 "error"
