"""What all that listens here shares: servers, fronts, and the servers of the lab."""
