"""Print the coverage that is in .coverage/data: lines and branches of each package. Used by `scripts/test --cover`."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import PurePath

ROW = "{:28}{:>16}{:>7}{:>16}{:>7}"
KINDS = (("covered_lines", "num_statements"), ("covered_branches", "num_branches"))


def main() -> None:
    measured = subprocess.check_output([sys.executable, "-m", "coverage", "json", "--quiet", "-o", "-"])
    packages: dict[str, Counter[str]] = {}
    for path, file in json.loads(measured)["files"].items():
        package = "/".join(PurePath(path).parent.parts[:2])
        for name in (package, "total"):
            packages.setdefault(name, Counter()).update(
                {each: file["summary"][each] for kind in KINDS for each in kind}
            )
    print(ROW.format("package", "lines", "%", "branches", "%"))
    for name, counts in sorted(packages.items(), key=lambda item: (item[0] == "total", item[0])):
        cells = []
        for ran, there in KINDS:
            cells += [f"{counts[ran]} of {counts[there]}", f"{100 * counts[ran] / (counts[there] or 1):.1f}"]
        print(ROW.format(name, *cells))


if __name__ == "__main__":
    main()
