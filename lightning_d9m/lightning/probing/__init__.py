"""Probes in a Trainer's fit: at modules, gradients, operations; and steps that are run twice."""
