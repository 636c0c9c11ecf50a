// Shows the OpenAPI document with Swagger UI. Addresses are relative, so that the page works behind
// a proxy that strips a path prefix. Nothing is requested from other hosts, and keys are not stored.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: false,
  persistAuthorization: false,
  validatorUrl: null,
});
