"""Ray clusters: jobs by their REST API, and stages whose processes run there."""
