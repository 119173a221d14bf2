"""Arrays of a teacher's predictions, and their validation."""
