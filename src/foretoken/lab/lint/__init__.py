"""What will not work in how a server is started; what each engine knows is data, in TOML files."""
