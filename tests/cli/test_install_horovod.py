"""The progress of ``d9m install-horovod`` in a pipe."""

from lightning_d9m.cli.install_horovod import _make_progress
from lightning_d9m.launch.status_line import StatusLine


def test_in_a_pipe_a_line_is_printed_every_half_minute(capsys):
    for quiet, expected in ((False, "0:00 a\n1:01 c\n1:31 e\n"), (True, "")):
        with StatusLine(quiet=quiet) as line:
            show = _make_progress(line, quiet=quiet)
            for seconds, text in ((0.0, "a"), (10.0, "b"), (61.0, "c"), (90.9, "d"), (91.0, "e")):
                show(seconds, text)
        assert capsys.readouterr().err == expected
