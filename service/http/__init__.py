"""HTTP itself: connections, requests and answers, bodies, errors, and the schemas of the API."""
