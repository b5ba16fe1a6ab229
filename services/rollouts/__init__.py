"""What training and evaluation share about a rollout: its prompts, its turns, its scores. No sockets, no processes.

Owns: the request of each turn (`conduct`, `examples`), what happens between turns (`dialogues`), the reward of a turn
(`scoring`), and the journal that both actors remember with (`journal`). Never touches: groups, batches, figures.
"""
