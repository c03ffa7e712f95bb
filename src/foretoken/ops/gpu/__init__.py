"""Operations on a GPU: draws, tests of drafts, the probe at load; PyTorch twins of its kernels."""
