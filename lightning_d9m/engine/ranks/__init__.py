"""Ranks, and what they tell each other: bytes, errors, and whether they still run.

One function that exchanges bytes comes in, from a Trainer, ``torch.distributed`` or Horovod; its
`Ranks` go out, which gather, agree and raise an error on all ranks. Read ``ranks.py`` first.
"""
