"""No secret leaves the machine in a bundle, and nothing that is needed is removed."""

import pytest

from lightning_d9m.history.secrets import SecretFilter

SECRET = "s3cr3t-value"  # noqa: S105 - no secret


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("clean", f"https://ann:{SECRET}@host/repo.git"),
        ("clean", f"https://{SECRET}@host/repo.git"),
        ("clean", f"https://host/data?version=3&token={SECRET}&split=test"),
        ("clean", f"https://host/data?X-Amz-Signature={SECRET}#top"),
        ("clean", f"python train.py --hf-token {SECRET} --epochs 3"),
        ("clean", f"python train.py --password='{SECRET} two words'"),
        ("clean", f"python train.py --api_key={SECRET}"),
        ("clean", f"python train.py --db-pwd {SECRET}"),
        ("clean", f"Authorization: Bearer {SECRET}"),
        ("clean", f"ghp_{SECRET}0123456789"),
        ("clean", f"the variable's {SECRET} in a path"),
        ("clean", f"WANDB_API_KEY={SECRET} python train.py"),
        ("clean", f"python train.py logger.token={SECRET}"),
        ("clean_code", f'client = Client(api_key="{SECRET}")'),
        ("clean_code", f"PASSWORD = '{SECRET}'"),
        ("clean_code", f'headers = {{"hf_token": "{SECRET}"}}'),
    ],
)
def test_a_secret_is_removed(method, text):
    secrets = SecretFilter({"MY_TOKEN": SECRET, "HOME": "/home/ann"})
    assert SECRET not in getattr(secrets, method)(text)
    # Also where the environment does not give it away.
    if "variable" not in text:
        secrets = SecretFilter({})
        assert SECRET not in getattr(secrets, method)(text)
    assert secrets.count == 1
    cleaned = getattr(secrets, method)(text)
    assert getattr(secrets, method)(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --max-tokens 512 --monkey 3 --seed 42 data.keys=3",
        "https://host/data?version=3&split=test",
        "embedding.token_embedding.weight",
        "git@host:ann/project.git",
        "for key in keys: print(key)",
    ],
)
def test_what_is_needed_stays(text):
    secrets = SecretFilter(
        {"TOKEN": "short", "KEYS": "project", "LANG": "values", "PWD": "project.git"}
    )
    assert secrets.clean(text) == text
    assert secrets.clean_code(text) == text
    assert (
        secrets.clean_code("values = sorted(found, key=len)") == "values = sorted(found, key=len)"
    )
    assert secrets.count == 0


def test_values_are_cleaned_at_any_depth_and_keys_stay():
    secrets = SecretFilter({})
    value = {"token": 3, "a": [{"url": "https://u:p@h"}, None, 1.5, True]}
    assert secrets.clean_values(value) == {
        "token": 3,
        "a": [{"url": "https://[removed]@h"}, None, 1.5, True],
    }
