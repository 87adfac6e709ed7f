"""DreamerV3: world-model reinforcement learning."""
