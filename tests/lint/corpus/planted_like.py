"""Causes that were planted in trainings, and innocent code that resembles them."""

import torch


class Sampler:
    def __init__(self, size, env):
        self.generator = torch.Generator()
        self.generator.seed()  # expect: D9M204
        self.fixed = torch.Generator()
        self.fixed.manual_seed(size)  # fine
        self.env = env
        self.env.seed()  # fine

    def draw(self, size):
        noise = torch.Generator()
        noise.seed()  # expect: D9M204
        return torch.randperm(size, generator=noise), torch.Generator().seed()  # expect: D9M204

    def seed(self):
        return self.fixed.initial_seed()


def shift(values):
    shifted = torch.empty(8)  # expect: D9M107
    shifted[1:] = values
    return shifted * 2


def halves(values, size):
    padded = torch.empty(size, size)  # expect: D9M107
    padded[:, :-1] = values
    return torch.relu(padded)


def every_other(values):
    mixed = torch.empty_like(values)  # expect: D9M107
    mixed[::2] = values[::2]
    return mixed


def interleave(values, others):
    both = torch.empty(8)  # fine
    both[::2] = values
    both[1::2] = others
    return both + 1


def fill_up(values, count):
    filled = torch.empty(8)  # fine
    filled[:count] = values
    filled[count:] = 0
    return filled


def fill_rest(values):
    rest = torch.empty(8)  # fine
    rest[1:] = values
    rest[0].zero_()
    return rest.sum()


def fill_in_loop(rows):
    matrix = torch.empty(len(rows), 3)  # fine
    for number, row in enumerate(rows):
        matrix[number] = row
    return matrix.mean()


def read_written_part(values):
    buffer = torch.empty(8)  # fine
    buffer[1:] = values
    return buffer[1:].sum()


def fill_elsewhere(values, fill):
    given = torch.empty(8)  # fine
    given[1:] = values
    fill(given)
    return given + 1
