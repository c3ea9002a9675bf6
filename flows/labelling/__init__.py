"""`rondo label`: a page on which people compare responses, without knowing whose they are."""
