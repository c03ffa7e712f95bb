"""What operators watch: metrics, log lines, traces, memory."""
