"""What is wrong with a run, in words: findings with what they cost, the evidence, and a remedy."""
