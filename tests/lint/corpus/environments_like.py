"""Environments of Gymnasium: reset with a seed, without one, and seeded elsewhere."""

import gymnasium as gym
from gymnasium.wrappers import RecordEpisodeStatistics

from mylib import Agent, evaluate, seed_environment


def collect(steps):
    env = RecordEpisodeStatistics(gym.make("CartPole-v1"))
    observation, _ = env.reset()  # expect: D9M211
    for _ in range(steps):
        action = env.action_space.sample()  # expect: D9M211
        observation, _, done, cut, _ = env.step(action)
        if done or cut:
            observation, _ = env.reset()  # fine
    return observation


def collect_seeded(steps, seed):
    env = gym.make("CartPole-v1")
    env.action_space.seed(seed)
    env.reset(seed=seed)  # fine
    for _ in range(steps):
        _, _, done, cut, _ = env.step(env.action_space.sample())  # fine
        if done or cut:
            env.reset()  # fine


def reset_to_nothing():
    env = gym.make_vec("CartPole-v1", num_envs=2)
    env.reset(seed=None)  # expect: D9M211


def seeded_by_another(seed):
    env = gym.make("CartPole-v1")
    seed_environment(env, seed)
    env.reset()  # fine
    return env


def seeded_as_before_gymnasium(seed):
    env = gym.make("CartPole-v1")
    env.seed(seed)
    return env.reset()  # fine


def of_a_caller(env, table):
    table.reset()  # fine
    env.reset()  # fine
    return env.action_space.sample()  # fine


class Runner:
    def __init__(self, seed):
        self.train_env = gym.make("CartPole-v1")
        self.test_env = gym.make("CartPole-v1")
        self.agent = Agent(self.train_env)
        self.train_env.reset(seed=seed)  # fine

    def run(self):
        self.agent.reset()  # fine
        self.train_env.reset()  # fine
        self.test_env.reset()  # expect: D9M211
        return evaluate(self.agent, self.test_env)
