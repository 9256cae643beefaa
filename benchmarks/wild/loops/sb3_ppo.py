"""PPO of stable-baselines3."""

from stable_baselines3 import PPO

model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, device="cpu", seed=1)
model.learn(total_timesteps=512)
