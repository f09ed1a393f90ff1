"""Turn raw confidence logits into calibrated survival probabilities.

Letters: ``n`` rounds, ``gamma`` drafts per round, ``z`` raw logit of the confidence head, ``c`` conditional acceptance
probability of a draft, ``a`` prefix survival, the product of the ``c`` so far. Drafts count from 0 in arrays and from 1
in what is printed. Pure numpy: no device, no engine.
"""
