"""What a training script calls: elastic training, DiLoCo, local SGD, hooks for DDP, samplers, checkpoints.

Imports `torch.backend`. Used by programs, through `covey.torch`.
"""
