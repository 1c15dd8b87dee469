"""Real ranks: launching them, watching them, recording what they do."""
