"""tell.py FOLDER [--all]: bars of all results in a folder: met or missed, with the ratio; misses are listed."""
import json, sys
from pathlib import Path
from benchmarks.report import report
for path in sorted(Path(sys.argv[1]).rglob("*.json")):
    try:
        sections = json.loads(path.read_text())["benchmarks"]
    except Exception:
        continue
    for name, section in sections.items():
        if "rows" in section:
            continue  # printed when measured
        if "cases" not in section:
            continue
        met, lines = 0, []
        for case in section["cases"]:
            for bar in case["bars"]:
                ours = case["default"] if bar["ours"] == "default" else bar["ours"]
                time = report.microseconds(case, ours)
                ratio = report.ratio(section, case, time, bar["against"]) if hasattr(report, "ratio") else None
                if ratio is None:
                    against = bar["against"]
                    if time is None:
                        lines.append(f"  {case['case']} {case['shape']}: {ours} {case['rows'].get(ours)}"[:200])
                        continue
                    if against == "bulk copy":
                        bulk = section["ceilings"].get("bulk_copy")
                        ratio = bulk and case["bytes"] / time / 1e3 / bulk
                    else:
                        peer = report.best_peer(case) if against == "best peer" else against
                        other = report.microseconds(case, peer)
                        ratio = other and other / time
                    if not ratio:
                        lines.append(f"  {case['case']} {case['shape']}: {ours} {time:.1f} us, no {against}: {case['rows'].get(against)}"[:200])
                        continue
                must = bar["must"] or bar["aim"]
                good = ratio >= must
                met += good
                if not good or "--all" in sys.argv:
                    lines.append(f"  {'ok  ' if good else 'MISS'} {case['case']} {case['shape']}: {ours} {time:.1f} us, {ratio:.3f} of {bar['against']} (must {must:.3f}), inverse {1 / ratio:.3f}")
        total = sum(len(case["bars"]) for case in section["cases"])
        print(f"{name}: {len(section['cases'])} cases, {met} of {total} bars met")
        print("\n".join(lines), flush=True)
