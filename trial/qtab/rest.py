"""rest.py DONE [arguments of benchmarks]: quantized_table without the cases of DONE; rows 1024, 2048, 512, 256, codes first."""
import json, sys
from pathlib import Path
from benchmarks.cases import quantized_table as t
done = {tuple(x) for x in json.loads(Path(sys.argv[1]).read_text())}
cases = t.cases
ORDER = {1024: 1, 512: 2, 256: 3, 2048: 4, 4096: 5, 128: 6, 96: 7}
def rest(quick=False, shapes=None):
    found = [c for c in cases(quick, shapes) if (c.name, *c.shape) not in done and c.bars]
    return sorted(found, key=lambda c: (not ("MXFP4" in c.name or "NF4" in c.name), ORDER.get(c.shape[0], 0)))
t.cases = rest
if __name__ == "__main__":
    from benchmarks.__main__ import main
    if "--list" in sys.argv:
        for c in rest(): print(c.name, c.shape)
        sys.exit()
    sys.exit(main(["quantized_table", *sys.argv[2:]]))
