"""What a user asks: `explain`, `list`, `doctor`, the trial of a model beside stock, and their tables."""
