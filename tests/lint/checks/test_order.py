"""Orders are found that decide something, and no others."""

import pytest

IMPORTS = "import glob, logging, os, random\nimport numpy as np\nimport torch\nfrom torch import nn"
LISTED = "    files = [n for n in os.listdir(folder) if n]\n"
CASES = {
    LISTED + "    return files": True,
    LISTED + "    return {n: i for i, n in enumerate(files)}": True,
    LISTED + "    return files[:3]": True,
    LISTED + "    random.shuffle(files)\n    return files": True,
    LISTED + "    other.sort()\n    return np.array(files)": True,
    LISTED + "    files.sort()\n    return np.array(files)": False,
    LISTED + "    kept = []\n    for n in files:\n        kept.append(n)\n    kept.sort()\n"
    "    return np.array(kept)": True,
    LISTED + "    return np.array(files), sorted(files)": True,
    LISTED + "    assert len(files) == 2\n    return files[:1]": True,
    LISTED + "    return files[0]": True,
    # Names that are made of each other; once the search in them did not end.
    LISTED + "    files = [n + folder for n in files]\n    other = [n for n in files]\n"
    "    files = [n for n in other]\n    return files": True,
    "    return glob.glob('*.txt')": True,
    "    return np.array(glob.glob('*.txt'))": True,
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return kept": True,
    "    kept = []\n    for n in os.listdir(folder):\n        kept.append(n)\n"
    "    return np.stack(kept)": True,
    "    for i, n in enumerate(os.listdir(folder)):\n        other[n] = i": True,
    "    for i, n in enumerate(os.listdir(folder)):\n        other[n] = folder": True,
    "    for n in os.listdir(folder):\n        other[n] = nn.Linear(4, 1)": True,
    "    for n in os.listdir(folder):\n        other[n] = random.random()": True,
    "    for n in os.listdir(folder):\n        other[n] = len(other)": True,
    "    for n in os.listdir(folder):\n        other[n] = len(other[n])": False,
    "    for n in os.listdir(folder):\n        with open(n, 'w') as file:\n"
    "            file.write(n)": False,
    "    found = os.listdir(folder)\n    raise ValueError(', '.join(found))": False,
    "    found = os.listdir(folder)\n    return ', '.join(found)": True,
    "    return list({'a', folder})": True,
    "    return {n: i for i, n in enumerate({'a', folder})}": True,
    "    raise ValueError(', '.join({'a', folder}))": False,
    "    logging.warning('%s', list({'a', folder}))": False,
    "    return '|'.join({'a', folder})": True,
    "    return torch.tensor([len(n) for n in {'a', folder}])": True,
    "    return torch.tensor([n for n in {folder + 'a'}])": False,
    "    return {'a', folder}.pop()": True,
    "    todo = {'a', 'b'}\n    while todo:\n        other.add(todo.pop())": True,
    "    (one,) = {'a'}\n    return [*{'a'}]": False,
    "    return max(set(folder), key=folder.count)": True,
    "    return sorted(set(folder), key=len)": True,
    "    return sorted(os.listdir(folder), key=lambda name: -len(name))": True,
    "    return sorted(set(folder), key=lambda name: (len(name), name))": False,
    "    return max(set(folder), key=str.lower)": False,
    "    return [other[n] for n in other.keys() & folder.keys()]": True,
    "    return [other[n] for n in other.keys() - folder]": True,
    "    assert not other.keys() ^ folder.keys()\n    return list(other.keys())": False,
    "    with os.scandir(folder) as found:\n        return [n.name for n in found]": True,
    "    with os.scandir(folder) as found:\n        return {n.name for n in found}": False,
    "    with os.scandir(folder) as found:\n        for n in found:\n"
    "            other.append(n.name)": True,
    "    return [n for n in os.listdir(folder) if n == other]": False,
    "    return [n for n in os.listdir(folder) if n != other]": True,
    "    seed = hash(folder)\n    random.seed(seed)": True,
    "    place = hash(folder)\n    return other[place]": False,
    "    found = {'a', folder}\n    if len(found) == 1:\n        return list(found)": False,
}


@pytest.mark.parametrize("body", CASES)
def test_an_order_that_decides_nothing_is_not_found(body, scan):
    found = scan(f"{IMPORTS}\n\n\ndef load(folder, other):\n{body}\n", whole=True)
    assert [one.certainty for one in found] == ["depends"] * CASES[body]
