"""Token ids in; token ids, log-probabilities and policy versions out."""
