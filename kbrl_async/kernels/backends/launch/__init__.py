"""What the launchers of all backends share, inside a confined child."""
