// Runs the scenarios with cloud.google.com/go/pubsub/v2.
package main

import (
	"context"
	"time"

	"cloud.google.com/go/pubsub/v2"
	apiv1 "cloud.google.com/go/pubsub/v2/apiv1"
	"cloud.google.com/go/pubsub/v2/apiv1/pubsubpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	scenarios "landline.test/clients"
)

type client struct {
	*pubsub.Client
	parent     string
	publishers map[string]*pubsub.Publisher
}

func main() {
	scenarios.Main(func(ctx context.Context, project string) (scenarios.Client, error) {
		inner, err := pubsub.NewClient(ctx, project)
		return &client{inner, "projects/" + project, map[string]*pubsub.Publisher{}}, err
	})
}

func (c *client) topic(id string) string        { return c.parent + "/topics/" + id }
func (c *client) subscription(id string) string { return c.parent + "/subscriptions/" + id }
func (c *client) snapshot(id string) string     { return c.parent + "/snapshots/" + id }

func (c *client) CreateTopic(ctx context.Context, topic, avroSchema string) error {
	request := &pubsubpb.Topic{Name: c.topic(topic)}
	if avroSchema != "" {
		schema, err := c.createSchema(ctx, avroSchema)
		if err != nil {
			return err
		}
		request.SchemaSettings = &pubsubpb.SchemaSettings{Schema: schema.Name, Encoding: pubsubpb.Encoding_JSON}
	}
	_, err := c.TopicAdminClient.CreateTopic(ctx, request)
	return err
}

func (c *client) createSchema(ctx context.Context, avroSchema string) (*pubsubpb.Schema, error) {
	schemas, err := apiv1.NewSchemaClient(ctx, scenarios.SchemaOptions()...)
	if err != nil {
		return nil, err
	}
	defer schemas.Close()
	schema := &pubsubpb.Schema{Type: pubsubpb.Schema_AVRO, Definition: avroSchema}
	return schemas.CreateSchema(ctx, &pubsubpb.CreateSchemaRequest{Parent: c.parent, SchemaId: "order", Schema: schema})
}

func (c *client) CreateSubscription(ctx context.Context, subscription, topic string, options scenarios.Options) error {
	request := &pubsubpb.Subscription{
		Name:                      c.subscription(subscription),
		Topic:                     c.topic(topic),
		EnableMessageOrdering:     options.Ordered,
		EnableExactlyOnceDelivery: options.ExactlyOnce,
		RetainAckedMessages:       options.RetainAcked,
		Filter:                    options.Filter,
	}
	if options.DeadLetterTopic != "" {
		name := c.topic(options.DeadLetterTopic)
		request.DeadLetterPolicy = &pubsubpb.DeadLetterPolicy{DeadLetterTopic: name, MaxDeliveryAttempts: 5}
	}
	_, err := c.SubscriptionAdminClient.CreateSubscription(ctx, request)
	return err
}

func (c *client) Publish(ctx context.Context, topic string, m scenarios.Message) func() (string, error) {
	publisher := c.publishers[topic]
	if publisher == nil {
		publisher = c.Publisher(topic)
		publisher.EnableMessageOrdering = true
		c.publishers[topic] = publisher
	}
	result := publisher.Publish(ctx, &pubsub.Message{Data: m.Data, Attributes: m.Attributes, OrderingKey: m.Key})
	return func() (string, error) { return result.Get(ctx) }
}

func (c *client) Receive(ctx context.Context, subscription string, maxOutstanding int, handle func(scenarios.Message)) error {
	sub := c.Subscriber(subscription)
	sub.ReceiveSettings.MaxOutstandingMessages = maxOutstanding
	return sub.Receive(ctx, func(_ context.Context, m *pubsub.Message) {
		got := scenarios.Message{ID: m.ID, Key: m.OrderingKey, Data: m.Data, Attributes: m.Attributes, Ack: m.Ack, Nack: m.Nack}
		if m.DeliveryAttempt != nil {
			got.Attempt = *m.DeliveryAttempt
		}
		got.AckConfirmed = func(ctx context.Context) (bool, error) {
			status, err := m.AckWithResult().Get(ctx)
			return status == pubsub.AcknowledgeStatusSuccess, err
		}
		handle(got)
	})
}

func (c *client) Seek(ctx context.Context, subscription string, to time.Time) error {
	target := &pubsubpb.SeekRequest_Time{Time: timestamppb.New(to)}
	_, err := c.SubscriptionAdminClient.Seek(ctx, &pubsubpb.SeekRequest{Subscription: c.subscription(subscription), Target: target})
	return err
}

func (c *client) Snapshot(ctx context.Context, subscription, snapshot string) error {
	request := &pubsubpb.CreateSnapshotRequest{Name: c.snapshot(snapshot), Subscription: c.subscription(subscription)}
	_, err := c.SubscriptionAdminClient.CreateSnapshot(ctx, request)
	return err
}

func (c *client) SeekSnapshot(ctx context.Context, subscription, snapshot string) error {
	target := &pubsubpb.SeekRequest_Snapshot{Snapshot: c.snapshot(snapshot)}
	_, err := c.SubscriptionAdminClient.Seek(ctx, &pubsubpb.SeekRequest{Subscription: c.subscription(subscription), Target: target})
	return err
}

func (c *client) Detach(ctx context.Context, subscription string) (bool, error) {
	name := c.subscription(subscription)
	if _, err := c.TopicAdminClient.DetachSubscription(ctx, &pubsubpb.DetachSubscriptionRequest{Subscription: name}); err != nil {
		return false, err
	}
	got, err := c.SubscriptionAdminClient.GetSubscription(ctx, &pubsubpb.GetSubscriptionRequest{Subscription: name})
	return got.GetDetached(), err
}
