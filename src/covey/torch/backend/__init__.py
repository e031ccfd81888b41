"""What torch.distributed calls: the process group, its store, the rendezvous, and tensors on devices.

Imports `covey.runtime`. Used by torch, through `covey.torch.entry`.
"""
