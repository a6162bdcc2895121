"""What several tests share: clocks, data, histories and fakes."""
