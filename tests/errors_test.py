import errno

import pytest

from difftx.errors import run_command


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(("filename", "shown"), [("run/config.json", "run/config.json: "), (None, "")])
def test_a_full_disk_is_one_line(capsys, filename, shown):
    with pytest.raises(SystemExit, match="1"):
        run_command(raising(OSError(errno.ENOSPC, "No space left on device", filename)))
    expected = f"error: {shown}No space left on device; make room, then run the same command again\n"
    assert capsys.readouterr().err == expected


def test_other_errors_of_the_system_keep_their_traceback():
    with pytest.raises(PermissionError):
        run_command(raising(PermissionError(errno.EACCES, "Permission denied")))
