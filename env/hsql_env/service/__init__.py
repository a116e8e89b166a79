"""Many episodes behind one address: HTTP/JSON service, clients, launcher."""
