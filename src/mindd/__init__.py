"""The wire of mindgrid: generated protobuf stubs, and (in a later release) the client."""
