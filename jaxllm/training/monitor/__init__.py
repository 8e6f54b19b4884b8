"""What a run reports while and after it trains: metrics, progress, charts, report, run card."""
