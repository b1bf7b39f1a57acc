"""What a run leaves behind for people: metrics, progress, figure, table, report. Needs no torch."""
