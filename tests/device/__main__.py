"""python -m tests.device script.py | -m module [arguments]: run Python on emulated devices."""

import os
import sys
from pathlib import Path

from tests.device import RUNNING, release
from tests.device.header import HeaderError

HERE = Path(__file__).resolve().parent


def main() -> None:
    if len(sys.argv) == 1:
        raise SystemExit(__doc__)
    try:
        release.require_release()  # before imports that fail with another release
        from tests.device import build

        build.folder()
    except (release.DeviceBuildError, HeaderError) as error:
        raise SystemExit(str(error)) from None
    paths = [str(HERE / "autostart"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ[RUNNING] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


main()
