"""What `d9m scan` calls certain of orders is certain."""

import pytest

IMPORTS = "import glob, logging, os, random\nimport numpy as np\nimport torch\nfrom torch import nn"
LISTED = "    files = [n for n in os.listdir(folder) if n]\n"
CASES = {
    LISTED + "    return files": "depends",
    LISTED + "    return {n: i for i, n in enumerate(files)}": "certain",
    LISTED + "    return files[:3]": "certain",
    LISTED + "    random.shuffle(files)\n    return files": "certain",
    LISTED + "    other.sort()\n    return np.array(files)": "certain",
    LISTED + "    files.sort()\n    return np.array(files)": None,
    LISTED + "    kept = []\n    for n in files:\n        kept.append(n)\n    kept.sort()\n"
    "    return np.array(kept)": "depends",
    LISTED + "    return np.array(files), sorted(files)": "certain",
    LISTED + "    assert len(files) == 2\n    return files[:1]": "certain",
    LISTED + "    return files[0]": "depends",
    # Names that are made of each other; once the search in them did not end.
    LISTED + "    files = [n + folder for n in files]\n    other = [n for n in files]\n"
    "    files = [n for n in other]\n    return files": "depends",
    "    pattern = 'a.txt'\n    return np.array(glob.glob(pattern))": None,
    "    return glob.glob('*.txt')": "depends",
    "    return np.array(glob.glob('*.txt'))": "certain",
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return kept": "depends",
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return np.stack(kept)": "certain",
    "    for i, n in enumerate(os.listdir(folder)):\n        other[n] = i": "certain",
    "    for i, n in enumerate(os.listdir(folder)):\n        other[n] = folder": "depends",
    "    for n in os.listdir(folder):\n        other[n] = nn.Linear(4, 1)": "certain",
    "    for n in os.listdir(folder):\n        other[n] = random.random()": "certain",
    "    for n in os.listdir(folder):\n        other[n] = len(other)": "certain",
    "    for n in os.listdir(folder):\n        other[n] = len(other[n])": None,
    "    for n in os.listdir(folder):\n        with open(n, 'w') as file:\n"
    "            file.write(n)": None,
    "    found = os.listdir(folder)\n    raise ValueError(', '.join(found))": None,
    "    found = os.listdir(folder)\n    return ', '.join(found)": "depends",
    "    return list({'a', folder})": "depends",
    "    return {n: i for i, n in enumerate({'a', folder})}": "certain",
    "    raise ValueError(', '.join({'a', folder}))": None,
    "    logging.warning('%s', list({'a', folder}))": None,
    "    return '|'.join({'a', folder})": "depends",
    "    return torch.tensor([len(n) for n in {'a', folder}])": "certain",
    "    return torch.tensor([n for n in {folder + 'a'}])": None,
    "    return {'a', folder}.pop()": "certain",
    "    todo = {'a', 'b'}\n    while todo:\n        other.add(todo.pop())": "depends",
    "    (one,) = {'a'}\n    return [*{'a'}]": None,
    "    found = {'a', folder}\n    if len(found) == 1:\n        return list(found)": None,
}


@pytest.mark.parametrize("body", CASES)
def test_an_order_that_is_settled_is_not_certain(body, scan):
    found = scan(f"{IMPORTS}\n\n\ndef load(folder, other):\n{body}\n", whole=True)
    assert [one.certainty for one in found] == [CASES[body]] * (CASES[body] is not None)


def test_items_that_an_index_picks_are_in_the_order_of_the_listing(scan):
    found = scan(
        "import os\n\n\nclass Samples:\n    def __init__(self, folder):\n"
        "        self.names = os.listdir(folder)\n        self.others = os.listdir(folder)\n\n"
        "    def __getitem__(self, index):\n"
        "        return self.names[index], self.find(self.others)\n",
        whole=True,
    )
    assert [(one.line, one.certainty) for one in found] == [(6, "certain"), (7, "depends")]
