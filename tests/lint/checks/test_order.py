"""What `d9m scan` calls certain of orders is certain."""

import pytest

from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.scanner import scan_file

LISTED = "    files = [n for n in os.listdir(folder) if n]\n"
CASES = {
    LISTED + "    return files": "certain",
    LISTED + "    other.sort()\n    return files": "certain",
    LISTED + "    files.sort()\n    return files": None,
    LISTED + "    kept = []\n    for n in files:\n        kept.append(n)\n    kept.sort()\n"
    "    return kept": "depends",
    LISTED + "    return files, sorted(files)": "depends",
    LISTED + "    assert len(files) == 1\n    return files[0]": "depends",
    LISTED + "    assert len(files) == 2\n    return files": "certain",
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return natsorted(kept)": "depends",
    "    pattern = 'a.txt'\n    return glob.glob(pattern)": None,
    "    return glob.glob('*.txt')": "certain",
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return kept": "certain",
    "    for n in os.listdir(folder):\n        with open(n, 'w') as file:\n"
    "            file.write(n)": None,
    "    found = os.listdir(folder)\n    raise ValueError(', '.join(found))": None,
    "    found = os.listdir(folder)\n    return ', '.join(found)": "certain",
    "    return list({'a', folder})": "certain",
    "    raise ValueError(', '.join({'a', folder}))": None,
    "    logging.warning('%s', list({'a', folder}))": None,
    "    return ', '.join({'a', folder})": "certain",
    "    return list({folder + 'a'})": None,
    "    (one,) = {'a'}\n    return [*{'a'}]": None,
    "    found = {'a', folder}\n    if len(found) == 1:\n        return list(found)": None,
}


@pytest.mark.parametrize("body", CASES)
def test_an_order_that_is_settled_is_not_certain(body, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import glob, logging, os\n\n\ndef load(folder, other):\n{body}\n")
    scan = scan_file(SourceFile(str(path)), "2.13.0", frozenset({"D9M301", "D9M302"}))
    assert [one.certainty for one in scan.findings] == [CASES[body]] * (CASES[body] is not None)
