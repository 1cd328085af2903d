"""decide.py RESULTS...: for each lost case of results.jsonl files, the rule in today's choice code (file:line).

Files may be of two cards (PART). A draw is lost below 0.95 (2eaddff over main) beyond its spread and by more
than 0.3 us. A case of a thin rule compares the implementation that main does not choose with the one it does.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from race import is_lost, report, short

found = {}
for name in sys.argv[1:]:
    for line in Path(name).read_text().splitlines():
        record = json.loads(line)
        key = record["tag"], record["line"], record["direction"]
        if "error" not in record or key not in found:
            found[key] = record
good = [r for r in found.values() if "ratio" in r]
if len(sys.argv) > 2:
    print(report([*found.values()], 0))


def kernels(record, build):
    return ", ".join(f"{k[:34]} {us}" for k, us in record.get("kernels", {}).get(build, []))


def show(r):
    a, b = r["builds"]
    print(f"{r['ratio']:.3f} [{r['spread'][0]} {r['spread'][1]}] {r['us'][a]} -> {r['us'][b]} us, off {r['off']:.0e}: {short(r)}")
    for (stage, one, two), rule in zip(r["changes"], r["rules"], strict=True):
        print(f"    {stage}: {a} {one}, {b} {two}, by {rule['place']} ({rule['why']})")
    for build in r["builds"]:
        print(f"    {build:6} {kernels(r, build)[:400]}")


def by_rule(records):
    """Groups cases by the place of the rule of their changed stages."""
    groups = {}
    for r in records:
        for place in dict.fromkeys(rule["place"].split(";")[0] for rule in r["rules"]):
            groups.setdefault(place, []).append(r)
    return groups


draws = [r for r in good if r["tag"] == "draw"]
print(f"\nLost draws, {sum(map(is_lost, draws))} of {len(draws)} timed:")
for r in sorted(filter(is_lost, draws), key=lambda r: r["ratio"]):
    show(r)
print("\nDraws by the rule of a stage that changed (file:line of main): timed, median, least, lost; first over last")
for place, rs in sorted(by_rule(draws).items(), key=lambda item: statistics.median(r["ratio"] for r in item[1])):
    ratios = [r["ratio"] for r in rs]
    print(f"{len(rs):4} {statistics.median(ratios):7.3f} {min(ratios):7.3f} {sum(map(is_lost, rs)):3}  {place}")
thin = [r for r in good if r["tag"] != "draw"]
print("\nThin rules: the other implementation's time over that of main's choice (below 1: the rule is wrong there)")
for tag in dict.fromkeys(r["tag"] for r in thin):
    rs = [r for r in thin if r["tag"] == tag]
    ratios = sorted(r["ratio"] for r in rs)
    print(f"{tag}: {len(rs)} timed, median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}, {sum(map(is_lost, rs))} lost")
    for r in sorted(rs, key=lambda r: r["ratio"]):
        a, b = r["builds"]
        rule = r["rules"][0]["place"].split(";")[0] if r["rules"] else ""
        chosen = r["changes"][0][2] if r["changes"] else ""
        print(f"    {r['ratio']:.3f} [{r['spread'][0]} {r['spread'][1]}] {r['us'][a]} -> {r['us'][b]} us; {short(r)}; {chosen} by {rule}")
failed = [r for r in found.values() if "error" in r]
if failed:
    print(f"\nNot timed, {len(failed)}:")
    for r in failed:
        print(f"    {r['error'][:150]}: {short(r)}")
