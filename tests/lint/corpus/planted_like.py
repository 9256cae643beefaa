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
