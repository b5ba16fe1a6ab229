"""What a run says of itself: logs, TensorBoard, the summary.

Owns: the format of log lines, metric tags and `summary.json`. Never touches: torch, the configuration, sockets.
Front doors: `logs.configure`, `tensorboard.Writer`, `training_metrics.scalars`, `system_metrics.scalars`,
`summary.build`.
"""
