"""`python fault_driver.py SPEC`: runs one trial in a fleet of its own, as a training run does, until it is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from system.fleet.local import LocalFleet

if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    with LocalFleet(Path(spec["scratch"]), target="fault_trials:run", warm=()) as fleet:
        fleet.start(spec)
        print(json.dumps(fleet.poll(120)))
