"""SAC of stable-baselines3."""

from stable_baselines3 import SAC

model = SAC("MlpPolicy", "Pendulum-v1", learning_starts=50, device="cpu", seed=1)
model.learn(total_timesteps=150)
