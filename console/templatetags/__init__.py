"""Words for the console's templates."""
