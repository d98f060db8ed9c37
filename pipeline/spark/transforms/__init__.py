"""What is computed: pure functions DataFrame -> DataFrame. Nothing here reads, writes, or knows where rows live."""
