"""tell.py FOLDER: each bar of serving's cases, met or not, whatever part of the cases was measured."""
import json, math, statistics, sys
from pathlib import Path
from benchmarks.report import report

for path in sorted(Path(sys.argv[1]).rglob("*.json")):
    section = json.loads(path.read_text())["benchmarks"].get("serving")
    if not section:
        continue
    small = []
    judged = report.judge(section)
    for j in judged:
        goal = j.must if j.must is not None else j.aim
        if j.aim == 1.3 and j.ratio:
            small.append(j.ratio)
        ratio = "-" if j.ratio is None else f"{j.ratio:.3f}, inverse {1 / j.ratio:.3f}"
        word = {True: "ok  ", False: "MISS", None: "none"}[j.met]
        print(f"{word} {j.case} {list(j.shape)}: {ratio} of {j.against} (must {goal:.3f})")
    if small:
        print(f"small caches: geometric mean {statistics.geometric_mean(small):.3f} of {len(small)} (must 1.3)")
    print(f"{len(section['cases'])} cases, {sum(j.met is True for j in judged)} of {len(judged)} bars met; {report.ceilings_line(section)}; {section.get('commit')}")
    for name, shape, names in ((c["case"], c["shape"], c["rows"]) for c in section["cases"]):
        print(name, shape, {n: round(r["microseconds"], 1) if "microseconds" in r else str(r)[:110] for n, r in names.items()})
    for case in section["cases"]:  # kernels of what is expected to miss
        if case["case"].startswith(("append", "decodes", "chunk", "decode, one", "query")):
            for n in ("mixed", "two_calls"):
                print(case["case"], n, [(k[:48], round(t, 2)) for k, t in case["rows"].get(n, {}).get("kernels", [])])
