"""Task synthesis: example databases, catalogs, and verified question-and-SQL tasks."""
