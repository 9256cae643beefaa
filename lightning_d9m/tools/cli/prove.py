"""``d9m prove``: write one file that commits to everything that decides a training's result."""

import argparse
from pathlib import Path

from msgspec.structs import asdict

from lightning_d9m.text import printable
from lightning_d9m.tools.cli.arguments import check_new_file
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.terminal import wrap
from lightning_d9m.tools.proof.training import make_proof, write_statement
from lightning_d9m.tools.segments.segment import RecordedRun

ARGUMENTS = """
ledger:RUN  ledger of the run: a folder fit-NNN, or a folder that holds exactly one
-o, --output FILE  the proof to write (default: proof.json)
--model FILE ...  a file with the final weights, which the proof is about, too; may be given
    several times
--sign METHOD  how model_signing signs the proof, in its words, such as "key --private_key FILE", or
    sigstore; the signature is FILE.sig beside it
--json  print the result as one JSON object
"""
EXAMPLE = "d9m prove logs/d9m/fit-000 --model model.ckpt -o proof.json"
SETTINGS = {"ledger": {"type": Path}, "output": {"default": Path("proof.json")}}


def run(arguments: argparse.Namespace) -> int:
    """Write the proof; return 0.

    Raises:
        LedgerError: If the ledger cannot be read, or the proof cannot be written.
        SettingError: If the proof exists, cannot be made, or cannot be signed.
    """
    output: Path = arguments.output
    check_new_file(output)
    recorded = RecordedRun(arguments.ledger)
    proof = make_proof(recorded, arguments.model or (), output.absolute().parent)
    write_statement(output, proof, arguments.sign)
    said = proof.predicate
    signature = f"{output}.sig" if arguments.sign else None
    hashed = len(said.packages) + len(said.uncommitted) - len(said.gaps)
    counts = len(proof.subject), len(said.run["sources"]["program"]), hashed
    lines = [
        "files of the run: {}; of the program: {}; packages: {}".format(*counts),
        "It does not commit to:",
        *(f"  {what}: {why}" for what, why in said.gaps.items()),
        f"signature: {signature}" if signature else "It is not signed: give --sign.",
    ]
    shown = [line for text in lines for line in wrap(printable(text))]
    verdict = f"{output} commits to {recorded.ledger.path} and what decided its result."
    facts = {"proof": str(output), "bytes": output.stat().st_size, "signature": signature}
    print_result(arguments.format, facts | asdict(said), shown, verdict)
    return 0
